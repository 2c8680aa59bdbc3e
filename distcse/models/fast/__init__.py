"""Exact shortcuts of the forward pass: packing, a one-token last layer, oneDNN weight layout, fast dropout."""
