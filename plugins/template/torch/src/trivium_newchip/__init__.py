"""newchip as a backend of trivium."""
