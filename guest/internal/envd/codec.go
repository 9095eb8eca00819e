package envd

import (
	"encoding/base64"
	"strconv"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	pb "agentenv/guest/gen/process"
)

// jsonCodec is the codec that the SDKs use. The messages of a command's start go through code of our own: right after
// a launch under emulation nothing is translated yet, and what protojson needs for them costs milliseconds.
// Whatever that code does not know exactly is left to protojson, so the result is the same (codec_test.go).
type jsonCodec struct{}

func (jsonCodec) Name() string { return "json" }

func (jsonCodec) Marshal(message any) ([]byte, error) {
	var event *pb.ProcessEvent
	switch m := message.(type) {
	case *pb.StartResponse:
		event = m.GetEvent()
	case *pb.ConnectResponse:
		event = m.GetEvent()
	}
	if event != nil {
		if out := encodeEvent(event); out != nil {
			return out, nil
		}
	}
	return protojson.Marshal(message.(proto.Message))
}

func (jsonCodec) Unmarshal(data []byte, message any) error {
	if start, ok := message.(*pb.StartRequest); ok {
		if decodeStart(data, start) {
			return nil
		}
		proto.Reset(start)
	}
	return protojson.UnmarshalOptions{DiscardUnknown: true}.Unmarshal(data, message.(proto.Message))
}

// encodeEvent gives nil for what it leaves to protojson.
func encodeEvent(e *pb.ProcessEvent) []byte {
	switch e := e.GetEvent().(type) {
	case *pb.ProcessEvent_Start:
		out := append(make([]byte, 0, 48), `{"event":{"start":{"pid":`...)
		return append(strconv.AppendUint(out, uint64(e.Start.GetPid()), 10), `}}}`...)
	case *pb.ProcessEvent_Data:
		switch d := e.Data.GetOutput().(type) {
		case *pb.ProcessEvent_DataEvent_Stdout:
			return encodeOutput("stdout", d.Stdout)
		case *pb.ProcessEvent_DataEvent_Stderr:
			return encodeOutput("stderr", d.Stderr)
		case *pb.ProcessEvent_DataEvent_Pty:
			return encodeOutput("pty", d.Pty)
		}
	case *pb.ProcessEvent_End:
		return encodeEnd(e.End)
	case *pb.ProcessEvent_Keepalive:
		return []byte(`{"event":{"keepalive":{}}}`)
	}
	return nil
}

func encodeOutput(name string, data []byte) []byte {
	out := make([]byte, 0, base64.StdEncoding.EncodedLen(len(data))+48)
	out = append(out, `{"event":{"data":{"`...)
	out = append(append(out, name...), `":"`...)
	return append(base64.StdEncoding.AppendEncode(out, data), `"}}}`...)
}

func encodeEnd(end *pb.ProcessEvent_EndEvent) []byte {
	if !plain(end.GetStatus()) || !plain(end.GetError()) {
		return nil
	}
	out := append(make([]byte, 0, 128), `{"event":{"end":{`...)
	field := func(name string) {
		if out[len(out)-1] != '{' {
			out = append(out, ',')
		}
		out = append(append(append(out, '"'), name...), `":`...)
	}
	text := func(name, value string) {
		field(name)
		out = append(append(append(out, '"'), value...), '"')
	}
	if code := end.GetExitCode(); code != 0 {
		field("exitCode")
		out = strconv.AppendInt(out, int64(code), 10)
	}
	if end.GetExited() {
		field("exited")
		out = append(out, "true"...)
	}
	if end.GetStatus() != "" {
		text("status", end.GetStatus())
	}
	if end.Error != nil {
		text("error", *end.Error)
	}
	return append(out, `}}}`...)
}

// plain text needs no escapes in JSON.
func plain(s string) bool {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c > 0x7e || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			return false
		}
	}
	return true
}

// decodeStart reads the request as the SDKs write it. False: it met something that protojson must decide.
func decodeStart(data []byte, out *pb.StartRequest) bool {
	s := scanner{data: data}
	var seen keys
	ok := s.object(func(key string) bool {
		switch {
		case key == "process" && seen.first(0):
			out.Process = &pb.ProcessConfig{}
			return s.config(out.Process)
		case key == "pty" && seen.first(1):
			out.Pty = &pb.PTY{}
			return s.pty(out.Pty)
		case key == "tag" && seen.first(2):
			return s.optional(&out.Tag)
		case key == "stdin" && seen.first(3):
			value, ok := s.boolean()
			out.Stdin = &value
			return ok
		}
		return false
	})
	return ok && s.end()
}

// keys tells whether a key comes for the first time.
type keys uint8

func (k *keys) first(i int) bool {
	was := *k&(1<<i) != 0
	*k |= 1 << i
	return !was
}

func (s *scanner) config(out *pb.ProcessConfig) bool {
	var seen keys
	return s.object(func(key string) bool {
		var ok bool
		switch {
		case key == "cmd" && seen.first(0):
			out.Cmd, ok = s.text()
			return ok
		case key == "cwd" && seen.first(1):
			return s.optional(&out.Cwd)
		case key == "args" && seen.first(2):
			return s.array(func() bool {
				arg, ok := s.text()
				out.Args = append(out.Args, arg)
				return ok
			})
		case key == "envs" && seen.first(3):
			return s.object(func(name string) bool {
				if _, twice := out.Envs[name]; twice {
					return false
				}
				if out.Envs == nil {
					out.Envs = map[string]string{}
				}
				out.Envs[name], ok = s.text()
				return ok
			})
		}
		return false
	})
}

func (s *scanner) pty(out *pb.PTY) bool {
	var seen keys
	return s.object(func(key string) bool {
		if key != "size" || !seen.first(0) {
			return false
		}
		out.Size = &pb.PTY_Size{}
		return s.object(func(key string) bool {
			var ok bool
			switch {
			case key == "cols" && seen.first(1):
				out.Size.Cols, ok = s.number()
			case key == "rows" && seen.first(2):
				out.Size.Rows, ok = s.number()
			}
			return ok
		})
	})
}

// scanner reads the JSON that machines write; every method gives false at anything unusual.
type scanner struct {
	data []byte
	at   int
}

func (s *scanner) space() {
	for s.at < len(s.data) {
		switch s.data[s.at] {
		case ' ', '\t', '\r', '\n':
			s.at++
		default:
			return
		}
	}
}

func (s *scanner) take(c byte) bool {
	s.space()
	if s.at < len(s.data) && s.data[s.at] == c {
		s.at++
		return true
	}
	return false
}

func (s *scanner) end() bool {
	s.space()
	return s.at == len(s.data)
}

func (s *scanner) object(field func(key string) bool) bool {
	return s.list('{', '}', func() bool {
		key, ok := s.text()
		return ok && s.take(':') && field(key)
	})
}

func (s *scanner) array(element func() bool) bool { return s.list('[', ']', element) }

func (s *scanner) list(open, shut byte, item func() bool) bool {
	if !s.take(open) {
		return false
	}
	if s.take(shut) {
		return true
	}
	for {
		if !item() {
			return false
		}
		if s.take(shut) {
			return true
		}
		if !s.take(',') {
			return false
		}
	}
}

func (s *scanner) optional(into **string) bool {
	text, ok := s.text()
	*into = &text
	return ok
}

// The characters after a backslash, and what they mean.
const escapes, meanings = `"\/bfnrt`, "\"\\/\b\f\n\r\t"

func (s *scanner) text() (string, bool) {
	if !s.take('"') {
		return "", false
	}
	start := s.at
	var out []byte // nil as long as the text stands there as it is
	for s.at < len(s.data) {
		c := s.data[s.at]
		switch {
		case c == '"':
			if out == nil {
				out = s.data[start:s.at]
			}
			s.at++
			return string(out), utf8.Valid(out)
		case c < 0x20:
			return "", false
		case c == '\\':
			if out == nil {
				out = append(make([]byte, 0, len(s.data)-start), s.data[start:s.at]...)
			}
			if s.at+1 >= len(s.data) {
				return "", false
			}
			i := 0
			for i < len(escapes) && escapes[i] != s.data[s.at+1] {
				i++
			}
			if i == len(escapes) {
				return "", false
			}
			out = append(out, meanings[i])
			s.at += 2
		default:
			if out != nil {
				out = append(out, c)
			}
			s.at++
		}
	}
	return "", false
}

func (s *scanner) boolean() (value, ok bool) {
	s.space()
	rest := s.data[s.at:]
	if len(rest) >= 4 && string(rest[:4]) == "true" {
		s.at += 4
		return true, true
	}
	if len(rest) >= 5 && string(rest[:5]) == "false" {
		s.at += 5
		return false, true
	}
	return false, false
}

func (s *scanner) number() (uint32, bool) {
	s.space()
	start, value := s.at, uint64(0)
	for s.at < len(s.data) && s.data[s.at] >= '0' && s.data[s.at] <= '9' && s.at-start < 9 {
		value = value*10 + uint64(s.data[s.at]-'0')
		s.at++
	}
	length := s.at - start
	if length == 0 || (length > 1 && s.data[start] == '0') {
		return 0, false
	}
	if s.at < len(s.data) {
		switch s.data[s.at] {
		case ',', '}', ' ', '\n', '\r', '\t':
		default:
			return 0, false
		}
	}
	return uint32(value), true
}
