"""One module a page of the dashboard."""
