"""Exact shortcuts of a forward pass: packing, the one-token last layer, oneDNN layout, fast dropout bits. Each equals the plain way."""
