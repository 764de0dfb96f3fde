// A FlowFabric worker in Go that uses only the standard library: go run worker.go
package main

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const ttl = 30 * time.Second

type dict = map[string]any
type answer struct {
	Draining bool
	Results  []struct{ Status int }
	Claims   []struct {
		Handle, Execution_kind string
		Payload_b64            []byte // The arguments of the call, as a JSON array.
	}
}

var tasks = map[string]func([]any) (any, error){
	"shout":  func(in []any) (any, error) { return strings.ToUpper(in[0].(string)), nil },
	"refuse": func([]any) (any, error) { return nil, errors.New("not today") },
}

func post(path string, body dict) (found answer) { // Retries; the server recognises repeats.
	data, _ := json.Marshal(body)
	for {
		request, _ := http.NewRequest("POST", os.Getenv("FF_URL")+"/v1/remote/"+path, bytes.NewReader(data))
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("Authorization", "Bearer "+os.Getenv("FF_API_TOKEN"))
		if reply, err := http.DefaultClient.Do(request); err == nil {
			err = json.NewDecoder(reply.Body).Decode(&found)
			reply.Body.Close()
			if reply.StatusCode == 200 && err == nil {
				return found
			} else if reply.StatusCode/100 == 4 && reply.StatusCode != 429 {
				panic(path + ": " + reply.Status)
			}
		}
		time.Sleep(time.Second)
	}
}

func run(handle, kind string, payload []byte) {
	var arguments []any
	json.Unmarshal(payload, &arguments)
	ended := make(chan func(), 1)
	go func() {
		result, err := tasks[kind](arguments)
		path, item := "complete", dict{"handle": handle, "result_encoding": "json"}
		if item["result_b64"], _ = json.Marshal(result); err != nil {
			path, item = "fail", dict{"handle": handle, "reason": err.Error()}
		}
		ended <- func() { post(path, dict{"items": []dict{item}}) }
	}()
	for {
		select {
		case report := <-ended:
			report()
			return
		case <-time.After(ttl / 3):
			renewed := post("renew", dict{"items": []dict{{"handle": handle}}})
			if renewed.Results[0].Status >= 400 {
				return // The lease is lost, and another worker may have the execution.
			}
		}
	}
}

func main() {
	me, stop := fmt.Sprintf("go-%d", os.Getpid()), make(chan os.Signal, 1)
	signal.Notify(stop, syscall.SIGTERM, os.Interrupt)
	fmt.Println("worker", me, "serves shout, refuse")
	for draining := false; len(stop) == 0 && !draining; {
		id := make([]byte, 16)
		rand.Read(id)
		hex := fmt.Sprintf("%x", id)
		uuid := hex[:8] + "-" + hex[8:12] + "-4" + hex[13:16] + "-8" + hex[17:20] + "-" + hex[20:]
		found := post("claim?wait_ms=2000", dict{"worker_instance_id": me, "request_id": uuid, "max": 1,
			"tasks": []string{"shout", "refuse"}, "lease_ttl_ms": ttl.Milliseconds()})
		for _, claim := range found.Claims {
			run(claim.Handle, claim.Execution_kind, claim.Payload_b64)
		}
		draining = found.Draining
	}
	post("claim", dict{"worker_instance_id": me, "leaving": true})
}
