"""The lock service: sessions and advisory locks, all of it hints."""
