"""The HTML report and the terminal summaries."""
