"""`AsyncVirtualLM` on a real vLLM: by name, then by an engine object of one's own."""

import asyncio
import json
import os
import sys
import warnings

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as published: the engine is in-process

folder = sys.argv[1]
SEQUENCES = [[3, 4, 5], [3, 4, 5, 6], [200]]
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 48,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**24,
}


def served_by_name():
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
            "number": llm.hash_to_int("poet"),
            "distinct": len({tuple(tokens) for tokens in drawn}),
        }


def served_by_object():
    from vllm import LLM

    from genlm.backend import AsyncVirtualLM

    # vLLM's own worker refuses to start in a control group that is full of file pages.
    engine = LLM(model=folder, worker_cls="genlm_vllm.cpu_worker.CPUWorker", **OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = AsyncVirtualLM(engine)
    with llm:
        return {
            "rows": llm.batch_next_token_logprobs_sync(SEQUENCES).tolist(),
            "warnings": [str(w.message) for w in caught if "AsyncVirtualLM" in str(w.message)],
            "max_context": llm.max_context,
            "kv_bytes": llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes,
        }


if __name__ == "__main__":
    print(json.dumps(served_by_name()))
    print(json.dumps(served_by_object()))
