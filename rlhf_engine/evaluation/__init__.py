"""Models side by side: answers drawn, scored and judged, with a table, JSON and a page (`rlhf-engine evaluate`)."""
