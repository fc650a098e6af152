// Trains, saves and samples over gRPC, and goes on when the trainer is killed in between. It needs nothing but proto/.
//
//	buf generate ../../../proto && go mod tidy
//	go run . 127.0.0.1:8001 127.0.0.1:8002      (trainer, sampler; TINSMITH_API_KEY, if any)
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"log"
	"math/rand"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "example.org/tinsmith/client/gen/tinsmith/v1"
)

var lost = map[codes.Code]bool{codes.Unavailable: true, codes.Canceled: true, codes.DeadlineExceeded: true}

func connect(address string) *grpc.ClientConn {
	sizes := grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(256 << 20))
	connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), sizes)
	if err != nil {
		log.Fatal(err)
	}
	return connection
}

// operate is the loop of docs/grpc.md: an operation has a number, so that it may be sent again until it is answered.
func operate[Q, R any](call func(context.Context, Q, ...grpc.CallOption) (R, error), request Q) R {
	ctx, until := context.Background(), time.Now().Add(10*time.Minute)
	if key := os.Getenv("TINSMITH_API_KEY"); key != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "x-api-key", key)
	}
	for delay := 250 * time.Millisecond; ; delay *= 2 {
		reply, err := call(ctx, request)
		if err == nil {
			return reply
		}
		answer := status.Convert(err)
		// The trainer's errors have details. A connection that is cut in the middle of an answer is Internal without
		// them, and a message that is too large, and always will be, ResourceExhausted without them.
		cut := answer.Code() == codes.Internal && len(answer.Details()) == 0
		full := answer.Code() == codes.ResourceExhausted && len(answer.Details()) > 0
		if !(lost[answer.Code()] || cut || full) || time.Now().After(until) {
			log.Fatalf("%T: %v", request, err)
		}
		fmt.Printf("%T: %s; once more\n", request, answer.Message())
		if delay > 5*time.Second {
			delay = 5 * time.Second
		}
		time.Sleep(delay + time.Duration(rand.Int63n(int64(delay)/2)))
	}
}

func bytesOf(values any) []byte {
	var data bytes.Buffer
	binary.Write(&data, binary.LittleEndian, values)
	return data.Bytes()
}

func chunk(tokens []int32) *pb.Chunk {
	return &pb.Chunk{Kind: &pb.Chunk_EncodedText{EncodedText: &pb.EncodedText{Tokens: bytesOf(tokens)}}}
}

// datum predicts each token from those before it.
func datum(tokens []int32) *pb.Datum {
	var targets []int64
	for _, token := range tokens[1:] {
		targets = append(targets, int64(token))
	}
	tensor := &pb.Tensor{Layout: &pb.Tensor_Dense{Dense: bytesOf(targets)}, Dtype: pb.Dtype_DTYPE_INT64}
	inputs := map[string]*pb.Tensor{"target_tokens": tensor}
	return &pb.Datum{ModelInput: []*pb.Chunk{chunk(tokens[:len(tokens)-1])}, LossFnInputs: inputs}
}

func main() {
	trainer, sampler := pb.NewTrainerServiceClient(connect(os.Args[1])), pb.NewSamplerServiceClient(connect(os.Args[2]))
	pause, _ := time.ParseDuration(os.Getenv("TINSMITH_PAUSE_MS") + "ms")
	tokens := make([]int32, 16)
	for n := range tokens {
		tokens[n] = int32(5 + 7*n%90)
	}
	model := fmt.Sprintf("go-%d-%d:train:0", os.Getpid(), time.Now().UnixNano()) // no other client's
	lora := &pb.LoraConfig{Rank: 8, Seed: proto.Int64(1), TrainAttn: true, TrainMlp: true, TrainUnembed: true}
	base := operate(trainer.GetTrainerInfo, &pb.GetTrainerInfoRequest{}).BaseModels[0]
	operate(trainer.CreateModel, &pb.CreateModelRequest{ModelId: model, BaseModel: base, LoraConfig: lora})
	data, seq := []*pb.Datum{datum(tokens)}, int32(0) // seq: number of the last operation
	for step := 1; step <= 6; step, seq = step+1, seq+2 {
		adam := &pb.OptimStepRequest_AdamParams{AdamParams: &pb.AdamParams{LearningRate: proto.Float64(0.01)}}
		optim := &pb.OptimStepRequest{ModelId: model, SeqId: seq + 2, Params: adam}
		stepped := make(chan *pb.OptimStepResponse)
		// Both are sent before either is awaited; the trainer runs them in the order of their numbers.
		go func() { stepped <- operate(trainer.OptimStep, optim) }()
		forward := &pb.ForwardBackwardRequest{ModelId: model, SeqId: seq + 1, LossFn: "cross_entropy", Data: data}
		fmt.Printf("step %d: loss %.6f\n", step, operate(trainer.ForwardBackward, forward).Metrics["loss:sum"])
		<-stepped
		time.Sleep(pause)
	}
	save := &pb.SaveCheckpointRequest{ModelId: model, SeqId: seq + 1, Kind: pb.CheckpointKind_CHECKPOINT_KIND_EPHEMERAL}
	version := operate(trainer.SaveCheckpoint, save).Checkpoint.VersionId
	params := &pb.SamplingParams{MaxTokens: proto.Int32(8), Temperature: proto.Float64(0), Stop: &pb.StopCondition{}}
	sample := &pb.SampleRequest{VersionId: version, NumSamples: 1, SamplingParams: params}
	sample.Prompt = []*pb.Chunk{chunk(tokens[:4])}
	drawn := operate(sampler.Sample, sample).Sequences[0]
	ids := make([]int32, len(drawn.Tokens)/4)
	binary.Read(bytes.NewReader(drawn.Tokens), binary.LittleEndian, ids)
	fmt.Printf("sampled %d (%s)\n", ids, drawn.StopReason)
	operate(trainer.DeleteModel, &pb.DeleteModelRequest{ModelId: model})
}
