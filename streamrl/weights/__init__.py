"""How the policy's weights get from the learner to the generators, in layers.

sender         the learner's end: send buffers, and rounds while receivers lack the newest version
receiver       a generator's end: loads the versions that the learner sends
rounds         one round: who gets a version by which route, and who has loaded it
sender_socket  the messages of rounds, and the answers to them
routes         which transport each receiver gets
connections    how much each connection to the learner may send
membership     who receives: alive, outdated, fenced, in which broadcast group
send_buffers   where a version waits for the sender, in memory that others can map
protocol       the messages, and who sends them when
transports/    a version's bytes: broadcast, shared memory, files; `receive` is their common end
layout         names, dtypes and shapes to buckets of bytes; the same at both ends
locality       the machine and GPUs of a process
codecs/        float8, differences, checksums: functions of bytes
"""
