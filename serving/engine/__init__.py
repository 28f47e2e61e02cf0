"""Scheduler, KV blocks, step batch, runner, sampler, executors. No HTTP here."""
