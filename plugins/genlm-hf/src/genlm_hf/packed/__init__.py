"""One packed forward pass over everything that is not computed yet."""

from genlm_hf.packed import attention, layout, step_attention

attention.register()
layout.register()
step_attention.register()
