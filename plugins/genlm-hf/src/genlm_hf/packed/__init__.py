"""One packed forward pass over all uncached tokens."""

from genlm_hf.packed import attention, layout, step_attention

attention.register()
layout.register()
step_attention.register()
