"""Runnable applications. Each asserts what it shows, and the tests run each of them."""
