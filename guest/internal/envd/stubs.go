package envd

import (
	"net/http"

	"agentenv/guest/gen/filesystem/filesystemconnect"
)

type cpuSampler struct{}
type watcherTable struct{}

func newWatcherTable() *watcherTable { return &watcherTable{} }
func runForwarder(string)            {}

func (s *server) getMetrics(w http.ResponseWriter, r *http.Request)  { fail(w, 501, "not yet") }
func (s *server) getFiles(w http.ResponseWriter, r *http.Request)    { fail(w, 501, "not yet") }
func (s *server) postFiles(w http.ResponseWriter, r *http.Request)   { fail(w, 501, "not yet") }
func (s *server) postCompose(w http.ResponseWriter, r *http.Request) { fail(w, 501, "not yet") }

type filesystemService struct {
	s *server
	filesystemconnect.UnimplementedFilesystemHandler
}
