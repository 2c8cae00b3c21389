"""LoRA + GRPO on one GPU: the data flow, and the room of each arrow.

    task rows -> prompts -> rollouts (G per prompt) -> rewards -> GRPO update -> adapter + run.json
                                                                                    |
                                          comparison <- evaluate (base, trained) <--+
                                                              GGUF, Hub <- merge <--+

what is asked for   config, config_check, command_line, script_flags, grpo_fields, hardware, errors, optional
rows and prompts    tasks/, prompts, data, json_lines, json_objects, starter/ (the embedded model and its problems)
running programs    sandbox/ (what a model wrote, against unit tests it never meets)
rewards             rewards, reward_registry (specs to functions), reward_files (a user's own), reward_guard;
                    training_set (rows as TRL is given them, and rewards called as it calls them)
the policy          base_model, policy (4-bit base + adapter), backends (who trains, who draws)
the plan (--plan)   plan, plan_report; model_shape and memory (of a step, by part), gpu_fit (what fits this card),
                    fit_offers (what to change), plan_time and gpu_rates
the GPU's memory    probe (a trial pass), chunked_log_probs
completions         rollouts (decoding_slots, slot_memory), merged_copy, engine_samplers; vllm_engine, vllm_server,
                    vllm_sampler (evaluation), vllm_rollouts (the adapter handed over at every step)
one policy          logprob_check (sampler against trainer, before a run), drift (at each step)
before a run        dry_run; preview (a few groups of the base), preview_groups, preview_verdict, preview_page;
                    difficulty (rows that the base solves sometimes)
several processes   ranks (which one this is, how they wait), launch (accelerate's --cpu)
training            train, grpo_arguments, checkpoints, adapter_files, stop_signal, step_phases, progress;
                    completion_log (completion_lines)
the watch           health (what is wrong with a step), validation (rows that are not trained on), watch (what follows)
at a run's end      evaluate (samples and verdicts), results, passk and comparison (statistics), finish_run;
                    report/ (the run as one page, and two beside each other)
scripts/evaluate.py evaluation, evaluation_options, evaluation_folder, evaluation_report; targets and subject_samplers
                    (runs, adapters, models), samples_file (made elsewhere)
scripts/merge.py    merging, merge_report, merge (shards); adapter_plan, merge_outputs, tied_embeddings, frozen_base,
                    merged_tensors; fidelity (what an update keeps), merge_divergence and streamed_model (KL);
                    tensor_files
export_gguf.py      gguf_options, gguf_export, gguf_architecture, gguf_types, gguf_tokenizer, gguf_sentencepiece,
                    modelfile
check_gpu.py        gpu_check, gpu_check_row, gpu_check_table; random_model, gpu_limits (what the card can do),
                    card_memory, pretended_card, timed_command
scripts/push.py     pushing, upload_files, whole_files, hub, hub_contents, hub_token, hub_failures; model_card,
                    card_schema, card_facts, card_figures, card_metadata, card_snippets
what lasts          run_record (run.json), atomic (files that are whole or absent), folder_lock

Importing this package loads none of torch, transformers, trl, peft, unsloth, vllm or datasets: they are imported by
the functions that use them, so that `--help` and argument errors answer at once.
"""

__version__ = "0.1.0"
