"""`make demo`: month-end statements on two workers, one of which is killed mid-task."""
