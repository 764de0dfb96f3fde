"""Where to look for work next."""
