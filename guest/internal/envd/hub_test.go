package envd

import (
	"testing"

	pb "agentenv/guest/gen/process"
)

func stdout(n int) *pb.ProcessEvent {
	return &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: &pb.ProcessEvent_DataEvent{
		Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: make([]byte, n)},
	}}}
}

func TestAFullSubscriberIsWaitedForAndFreedWhenItLeaves(t *testing.T) {
	var h hub
	slow, gone := h.subscribe(), h.subscribe()
	h.publish(stdout(queueLimit))
	done := make(chan struct{})
	go func() {
		h.publish(stdout(1))
		close(done)
	}()
	if e, err := slow.pop(); e == nil || err != nil {
		t.Fatal(e, err)
	}
	h.unsubscribe(gone)
	<-done
	if e, err := slow.pop(); len(e.GetData().GetStdout()) != 1 || err != nil {
		t.Fatal(e, err)
	}
}

func TestASubscriberAfterTheEndGetsTheEnd(t *testing.T) {
	var h hub
	early := h.subscribe()
	end := &pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: &pb.ProcessEvent_EndEvent{Exited: true}}}
	h.publish(stdout(3))
	h.finish(end)
	if e, _ := early.pop(); len(e.GetData().GetStdout()) != 3 {
		t.Fatal(e)
	}
	for _, s := range []*subscriber{early, h.subscribe()} {
		if e, _ := s.pop(); e.GetEnd() == nil {
			t.Fatal(e)
		}
	}
}

func TestACutOffSubscriberLearnsWhy(t *testing.T) {
	s := newSubscriber()
	s.close(errTooSlow)
	s.push(stdout(1))
	if _, err := s.pop(); err != errTooSlow {
		t.Fatal(err)
	}
}
