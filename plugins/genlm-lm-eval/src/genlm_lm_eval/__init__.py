"""lm-evaluation-harness on every engine of genlm.

Importing this package makes the model `genlm` known to the harness:

    import genlm_lm_eval, lm_eval
    lm_eval.simple_evaluate(model="genlm", model_args="backend=hf,pretrained=demo", tasks=[...])

`python -m genlm_lm_eval` is the command `lm_eval` with this import before it.
"""

from genlm_lm_eval.model import GenlmLM

__all__ = ["GenlmLM"]
