"""Private and undocumented names of other libraries, one module per library; no other module uses such names.

Each function says why the public API is not enough. `tests/unit/test_compat.py` fails if a new version of a library moves a
name. `compat.torch` imports PyTorch; the others import nothing until a function is called. Ray's names are in
`distcse.cluster.versions`.
"""
