"""Measures what this machine, with this version of Tinsmith, can do with one base model.

    command    the command line
    examine    runs the phases, one after the other
    subject    the model, its device and type, and the token sequences and adapters of every comparison
    oracle     reference logprobs and gradients: plain transformers, one sequence at a time
    trainer    the packed training engine: logprobs, gradients, save and reload, speed, memory
    samplers   each installed sampling engine: logprobs of prompts and of the tokens that it draws
    coverage   parts of the model that adapters do not reach, or that are missing
    limits     largest gaps between two correct computations
    verdict    turns gaps and limits into checks, and checks into a verdict
    report     prints the verdict as text and as JSON

One model is in memory at a time.
"""
