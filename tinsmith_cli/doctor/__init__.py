"""What this machine and this version of Tinsmith can do with one base model: measured, not promised.

    command    the command line of it
    examine    the phases, one after the other
    subject    the model, where and how it is run, the token sequences and the adapters of every comparison
    oracle     plain transformers, one sequence at a time: what is right
    trainer    the packed training engine: the same logprobs, gradients, save and reload, speed, memory
    samplers   each sampling engine that is installed: the same logprobs, of prompts and of what it draws
    coverage   what no adapter reaches, what is missing
    limits     how far two correct computations may be apart
    verdict    gaps and limits become checks; checks become a verdict
    report     the verdict as text and as JSON

One model is in memory at a time.
"""
