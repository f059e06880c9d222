"""One packed forward pass over all uncached tokens."""

from genlm_hf.packed import layout

layout.register()
