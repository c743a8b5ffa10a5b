MODELS_OF_LAWS = (
    "gpt",
    "gpt_tied",
    "frozen",
    "unused",
    "tied_blocks",
    "uneven",
    "called_twice",
    "experts",
    "buffers",
    "adapters",
    "shared_list",
    "weird_model",
    "frozen_prefix",
    "structured",
    "sequential",
    "skip_inside",
)


def laws(folder: Path) -> dict[str, Run]:
    runs = {}
    for name in MODELS_OF_LAWS:
        runs[name] = train(name, config(clipping=0.5), steps=3)
    runs["bf16"] = train("gpt", config(precision="bf16"), steps=3)
    runs["small window"] = train(
        "gpt", config(section={"window": 1}), steps=3, options={"num_layers": 5}
    )
    return runs
