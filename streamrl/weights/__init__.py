"""How the policy's weights get from the learner to the generators.

layout       names, dtypes and shapes to buckets of bytes; the same at both ends
groups       torch.distributed groups of separately started processes, gloo or NCCL
transfer     one update's bytes: broadcast, both ends; files, safetensors; shared, memory in common
send_buffers where a version waits for the sender, in memory that others can map
membership   who receives: heard of, outdated, fenced, with whom it shares a broadcast
routes       which of these ways a version takes to each receiver
channel      who gets which version when: announce, ready, transfer, loaded; both ends
"""
