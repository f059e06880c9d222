"""lm-evaluation-harness on every engine of genlm.

Importing this package registers the model `genlm` with the harness:

    import genlm_lm_eval, lm_eval
    lm_eval.simple_evaluate(model="genlm", model_args="backend=hf,pretrained=demo", tasks=[...])

`python -m genlm_lm_eval` imports this package and runs the command `lm_eval`.
"""

from genlm_lm_eval.model import GenlmLM

__all__ = ["GenlmLM"]
