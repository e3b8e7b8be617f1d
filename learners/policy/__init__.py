"""The networks that a learner trains or scores with: policy, reference and critic."""
