"""The documentation: what its pages tell a reader to run, and the site that is built of them."""
