"""Estimates what a recipe costs on given machines: tokens, FLOPs, bytes, memory, time, and the bottleneck."""
