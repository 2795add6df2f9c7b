import torch
from torch import nn


class Player:
    def __init__(self, env, limit):
        self.env, self.limit = env, limit
        self.device = torch.device("cuda")
        self.net = nn.Linear(4, 2).to(self.device)
        self.state = torch.FloatTensor(env.reset())
        self.scale = torch.ones(4)
        self.rewards = []

    def play(self, steps):
        for step in range(steps):
            self.state = self.state.to(self.device)  # CPY001
            self.scale = self.scale.to(self.device)
            with torch.no_grad():
                value = self.net(self.state * self.scale)
            action = value.argmax().item()  # SYN001
            following, reward, done, _ = self.env.step(action)
            self.rewards.append(reward)
            self.state = torch.FloatTensor(following)
            terminal = len(self.rewards) == self.limit
            if done or terminal or step == steps - 1:
                print(value.max().item())


def main(env):
    player = Player(env, 50)
    for _ in range(10):
        player.play(1000)


main(None)
