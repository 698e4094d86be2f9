"""Runs observers, as a service: with health, metrics, and an orderly end."""
