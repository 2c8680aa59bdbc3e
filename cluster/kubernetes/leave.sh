#!/bin/bash
# preStop of KubeRay's pods, in the image as `distcse-leave head|worker [SECONDS]`: asks runs for a checkpoint before the pod ends, and waits for it.
seconds=${2:-120}
if [ "$1" = head ]; then
  # The driver writes a checkpoint and ends with 130, which fails its job: KubeRay starts it again (backoffLimit), and it resumes. A job
  # that Ray is asked to stop would count as complete. Only the driver gets the signal, not the shells around it, whose command lines
  # contain its own: the job would fail, and its next start begin, before the checkpoint is written.
  driver='^[^ ]*python[^ ]* -m distcse\.'
  pkill -TERM -f -- "$driver" || exit 0
  for _ in $(seq "$seconds"); do
    pgrep -f -- "$driver" >/dev/null || break
    sleep 1
  done
  exit 0
fi
# Tell Ray that the node leaves: the run writes a checkpoint and continues on the others. Ray ends on the node once nothing runs there.
node=$(python -c "import ray; ray.init('auto', logging_level='error'); print(ray.get_runtime_context().get_node_id())")
ray drain-node --address="$RAY_ADDRESS" --node-id="$node" --reason=DRAIN_NODE_REASON_PREEMPTION \
  --reason-message="the pod ends" --deadline-remaining-seconds="$seconds" || exit 0
for _ in $(seq "$seconds"); do
  grep -qsx raylet /proc/[0-9]*/comm || break
  sleep 1
done
