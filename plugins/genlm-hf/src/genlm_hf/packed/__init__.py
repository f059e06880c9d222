"""One packed forward pass over everything that is not computed yet."""

from genlm_hf.packed import attention, layout

attention.register()
layout.register()
