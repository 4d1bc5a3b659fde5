"""One prompt under two settings at once: a picture and a page of all combinations."""
