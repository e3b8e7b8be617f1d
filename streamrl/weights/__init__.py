"""How the policy's weights get from the learner to the generators, in layers.

sender         the learner's end: sends the newest version to the receivers that lack it
receiver       a generator's end: loads the versions that the learner sends
sender_socket  the learner's messages, the answers to them, and what each connection may send
routes         which transport each receiver gets
membership     who receives: alive, outdated, fenced, in which broadcast group
protocol       the messages, and who sends them when
transports/    a version's bytes: shared memory, broadcast, files; `receive` is their common end
layout         names, dtypes and shapes to buckets of bytes; the same at both ends
locality       the machine and GPUs of a process, and who can share them
float8, lora   matrices in eight bits; the factors of LoRA

One update, with shared memory and the HF engine:

 1  Learner._publish               learners.learner       after a step
 2  WeightSender.snapshot          sender                 in the training thread, then `publish`
 3  SendBuffers.write              shared_memory          stamp, copy and cast: the learner goes on
 4  WeightSender._send_versions    sender                 holds the newest complete buffer
 5  WeightSender._update           sender
 6  Membership.outdated            membership             who lacks the version
 7  Routes.split                   routes                 by which transport
 8  WeightSender._share            sender                 where it is in memory
 9  SenderSocket.ask               sender_socket          a Transfer to each
10  WeightReceiver._on_transfer    receiver               at the generator
11  Generator._load_weights        actors.generator
12  UpdatableEngine.load_weights   actors.engines.updates
13  HfEngine._receive              hf.engine              beside the sampling, in a thread
14  TransferReceiver.tensors       receive
15  SharedReader.tensors           shared_memory          checks the stamp after the last byte
16  SpareWeights.stage             hf.weights             into the second set of parameters
17  HfEngine._apply                hf.engine              between two tokens: SpareWeights.swap
18  WeightSender._conclude         sender                 the answer: Membership.on_loaded

A broadcast is announced before 9, and has `BroadcastSender` after it, `BroadcastReceiver` in 15;
a file has `FileSender` before it and `FileReader`. vLLM and SGLang receive into host memory in 13
and load it in the pause of 17 (`ServerWeights.apply`, `ServerUpdates.load_in_pause`).
"""
