"""`AsyncVirtualLM` on a real vLLM."""

import asyncio
import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as published: the engine is in-process

folder = sys.argv[1]
SEQUENCES = [[3, 4, 5], [3, 4, 5, 6], [200]]
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 48,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**24,
}


def served():
    from genlm.backend import AsyncVirtualLM

    with AsyncVirtualLM.from_name(folder, engine_opts=OPTIONS, cache_size=2) as llm:
        rows = asyncio.run(llm.batch_next_token_logprobs(SEQUENCES))
        again = llm.next_token_logprobs_sync(SEQUENCES[2])
        hits = llm.statistics().cache_hits
        asyncio.run(llm.release_all())
        drawn = asyncio.run(llm.batch_sample([[3, 4]] * 8, 4, [], seed=1))
        return {
            "rows": rows.tolist(),
            "again": again.tolist(),
            "hits": hits,
            "entries": len(llm.cache),
            "model": type(llm.underlying_model).__name__,
            "distinct": len({tuple(tokens) for tokens in drawn}),
        }


if __name__ == "__main__":
    print(json.dumps(served()))
