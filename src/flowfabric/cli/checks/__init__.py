"""The checks of `flowfabric doctor`."""
