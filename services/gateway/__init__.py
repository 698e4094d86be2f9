"""The gateway: transactions for other languages, and forwarding for clients outside the network."""
