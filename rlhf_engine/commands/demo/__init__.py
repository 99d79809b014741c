"""The demo: a small model trained from scratch and judged, on a task that is made up here."""
