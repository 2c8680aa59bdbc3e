"""Scripts to start from; nothing imports them."""
