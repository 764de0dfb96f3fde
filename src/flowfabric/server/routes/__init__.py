"""The routes, one file per resource; `table.py` joins them."""
