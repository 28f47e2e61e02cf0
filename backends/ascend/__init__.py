"""The ascend backend: Huawei Ascend NPUs through torch-npu. Data and a probe; devices are those of `torch_accelerator`."""
