"""The command `lm_eval` with the registered model `genlm`.

lm_eval 0.4.13 does not look for models of other distributions, so its command refuses
`--model genlm`.
"""

from lm_eval.__main__ import cli_evaluate

import genlm_lm_eval  # noqa: F401 - registers the model


def main() -> None:
    """Run the harness with the arguments of the command line."""
    cli_evaluate()


if __name__ == "__main__":
    main()
