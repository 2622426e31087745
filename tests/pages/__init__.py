"""Small pages that the tests drive, and the server that serves them."""
