"""Processes of a run: what a launcher started, and the exchanges between ranks."""
