"""How the policy's weights get from the learner to the generators.

layout       names, dtypes and shapes to buckets of bytes; the same at both ends
groups       torch.distributed groups of separately started processes, gloo or NCCL
transfer     one update's bytes: broadcast, or a safetensors file; both ends
membership   who receives: heard of, outdated, fenced, with whom it shares a broadcast
channel      who gets which version when: announce, ready, transfer, loaded; both ends
"""
