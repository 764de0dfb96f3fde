"""The engine on Valkey: one class per concern; nothing else sends a command."""
