"""The HTTP server: REST API, background jobs, and the process around them."""
