"""How the policy's weights travel from the learner to the generators.

One update, with shared memory and the HF engine:

 1  Learner._publish               learners.learner       after a step
 2  SendBuffers.write              shared_memory          stamp, copy and cast: the learner goes on
 3  WeightSender._update           sender                 holds the newest complete buffer
 4  Membership.outdated            membership             who lacks the version
 5  Routes.split                   routes                 by which transport
 6  WeightSender._share            sender                 where it is in memory
 7  SenderSocket.ask               sender_socket          a Transfer to each
 8  WeightReceiver._on_transfer    receiver               at the generator
 9  Generator._load_weights        actors.generator
10  UpdatableEngine.load_weights   actors.engines.updates
11  TransferReceiver.tensors       receive                beside the sampling, in a thread
12  SharedReader.tensors           shared_memory          checks the stamp after the last byte
13  SpareWeights.stage             hf.engine              into the second set of parameters
14  SpareWeights.swap              hf.engine              between two tokens
15  WeightSender._conclude         sender                 the answer: Membership.on_loaded

A broadcast is announced before 7, and has `BroadcastSender` after it, `BroadcastReceiver` in 12; a
file has `FileSender` before 7 and `files` in 12. vLLM and SGLang receive into host memory in 11 and
load it in the pause of 14 (`ServedEngine._apply`, `ServerUpdates.load_in_pause`). `protocol`
defines the messages; `layout` cuts the parameters into the same bytes at both ends.
"""
