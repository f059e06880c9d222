"""genlm-control's `PromptedLLM` with log-probabilities from scores, short enough to copy.

The original's `prefix` and `complete` request the row of every prefix of a context and read
one entry of each. Here a context is scored in one request, and the probability of its end is
the sum of a few entries of one row; no row leaves the engine. Needs genlm-control, and a model
of `genlm.load_model` or of this project's `genlm.backend`.
"""

import asyncio

from genlm.control import SMC, PromptedLLM, direct_token_sampler

import genlm.backend


class ScoredLLM(PromptedLLM):
    """A `PromptedLLM`; what `spawn` returns is a plain one."""

    async def log_probability(self, context):
        """Log-probability of a context after the prompt."""
        if not context or not self.prompt_ids or self.temperature != 1:
            return await super().log_probability(context)
        ids = [*self.prompt_ids, *self.encode_tokens(context)]
        scores = await self.model.score(ids, len(self.prompt_ids), lora_name=self.lora_name)
        return float(scores.double().sum())

    async def complete(self, context):
        """Log-probability of a context and of its end after the prompt."""
        if not self.prompt_ids or self.temperature != 1:
            return await super().complete(context)
        ids = [*self.prompt_ids, *self.encode_tokens(context)]
        ends = self.token_maps.eos_idxs
        log_end = self.model.log_mass(ids, ends, lora_name=self.lora_name)
        return sum(await asyncio.gather(self.log_probability(context), log_end))


async def _main() -> None:
    model = genlm.backend.load_model_by_name("demo", backend="hf")
    with model:
        llm = ScoredLLM(model, eos_byte_strings=[b".", b","])
        llm.set_prompt_from_str("The value of")
        smc = SMC(direct_token_sampler(llm))
        particles = await smc(n_particles=10, ess_threshold=0.5, max_tokens=8)
        for context, _ in particles:
            tokens = [token for token in context if isinstance(token, bytes)]
            print(f"{await llm.prefix(tokens):8.2f}  {b''.join(tokens)!r}")


if __name__ == "__main__":
    asyncio.run(_main())
