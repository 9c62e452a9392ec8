"""Cases that tests of several rooms share."""
