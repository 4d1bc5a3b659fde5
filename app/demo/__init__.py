"""The demo: a page in the browser for one search at a time, and a line for those who wait."""
