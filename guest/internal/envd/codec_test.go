package envd

import (
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "agentenv/guest/gen/process"
)

var startRequests = []string{
	`{"process":{"cmd":"/bin/bash","args":["-l","-c","echo hi"],"envs":{}},"stdin":false}`,
	`{"process":{"cmd":"/bin/bash","args":["-i","-l"],"envs":{"TERM":"xterm","A":"\"q\" \\ \n é"},"cwd":"/tmp"},"pty":{"size":{"cols":80,"rows":24}}}`,
	`{"process":{"cmd":"x"},"tag":"t","stdin":true}`,
	` { "process" : { "args" : [ ] } } `,
	`{}`, `{"process":null}`, `{"stdin":null}`, `{"unknown":1}`, `{"tag":1}`, `{"process":{"cmd":"\u00e9\ud83d\ude00"}}`,
	`{"pty":{"size":{"cols":"80","rows":1e2}}}`, `{"pty":{"size":{"cols":012}}}`, `{"stdin":true,"stdin":false}`, `{"tag":"a"} x`,
	`{"process":{"envs":{"A":"1","A":"2"}}}`, "{\"tag\":\"\xff\"}", "{\"tag\":\"a\nb\"}", `{"tag":"a`, `[]`, `{"stdin":truex}`,
	`{"pty":{"size":{"cols":4294967295}}}`, `{"pty":{"size":{"cols":4294967296}}}`, `{"process":{"args":["a",]}}`,
}

// sameAsProtojson: our decoder may refuse, but never reads anything differently.
func sameAsProtojson(t *testing.T, data []byte) bool {
	t.Helper()
	ours, theirs := &pb.StartRequest{}, &pb.StartRequest{}
	if !decodeStart(data, ours) {
		return false
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(data, theirs); err != nil {
		t.Fatalf("%q is not valid but was read: %v", data, err)
	}
	if !proto.Equal(ours, theirs) {
		t.Fatalf("%q: ours %v, protojson %v", data, ours, theirs)
	}
	return true
}

func TestTheFastPathReadsWhatTheSDKsWrite(t *testing.T) {
	for i, text := range startRequests {
		fast := sameAsProtojson(t, []byte(text))
		if i < 4 && !fast {
			t.Errorf("%q is left to the slow path", text)
		}
	}
}

func FuzzStartRequest(f *testing.F) {
	for _, text := range startRequests {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, data []byte) { sameAsProtojson(t, data) })
}

func TestEventsAreWrittenLikeProtojsonWritesThem(t *testing.T) {
	data := func(d *pb.ProcessEvent_DataEvent) *pb.ProcessEvent {
		return &pb.ProcessEvent{Event: &pb.ProcessEvent_Data{Data: d}}
	}
	end := func(e *pb.ProcessEvent_EndEvent) *pb.ProcessEvent {
		return &pb.ProcessEvent{Event: &pb.ProcessEvent_End{End: e}}
	}
	for _, e := range []*pb.ProcessEvent{
		{Event: &pb.ProcessEvent_Start{Start: &pb.ProcessEvent_StartEvent{Pid: 4294967295}}},
		{Event: &pb.ProcessEvent_Keepalive{Keepalive: &pb.ProcessEvent_KeepAlive{}}},
		data(&pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stdout{Stdout: []byte("a\x00\xff")}}),
		data(&pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Stderr{Stderr: []byte("ab")}}),
		data(&pb.ProcessEvent_DataEvent{Output: &pb.ProcessEvent_DataEvent_Pty{Pty: []byte("")}}),
		data(&pb.ProcessEvent_DataEvent{}),
		end(&pb.ProcessEvent_EndEvent{}),
		end(&pb.ProcessEvent_EndEvent{ExitCode: -1, Status: "signal: killed", Error: proto.String("signal: killed")}),
		end(&pb.ProcessEvent_EndEvent{ExitCode: 3, Exited: true, Status: "exit status 3", Error: proto.String("")}),
		end(&pb.ProcessEvent_EndEvent{Status: "\"odd\"\n<é>"}),
		{},
	} {
		for _, m := range []proto.Message{&pb.StartResponse{Event: e}, &pb.ConnectResponse{Event: e}} {
			text, err := jsonCodec{}.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			back := m.ProtoReflect().New().Interface()
			if err := protojson.Unmarshal(text, back); err != nil || !proto.Equal(m, back) {
				t.Errorf("%s: %v (%v)", text, back, err)
			}
		}
	}
}
