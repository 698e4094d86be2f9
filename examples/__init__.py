"""Programs to start from. Each runs with one command."""
